"""`torchrun -m gdncp.bench.multi_gpu PART`: several GPUs of one host, measured part by part beside the peers.

Reading order: `presets` (what is run), `ranks` (who runs it), `clock` (how time is taken), `book` (what is written);
then the parts: `checks` with `small_cases` and `variants`, `times` with `ours`, `weak` and `trace`, `peers`, `killed`,
and the links in `gdncp.calibrate.links`; last `merge` and `page`.
bench/multi_gpu.sh runs all of them unattended.
"""
