"""Kernels for Hopper (sm_90a) in Gluon: TMA, wgmma and warp specialisation.  bf16 or fp16 tokens, K = V = 64 or 128."""
