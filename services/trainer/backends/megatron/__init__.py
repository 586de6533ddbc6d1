"""The Backend port on Megatron-Core: real Megatron layers, DDP and distributed optimizer, on CUDA or on a CPU."""
