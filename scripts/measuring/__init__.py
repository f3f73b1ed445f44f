"""What measuring programs share: processes, memory, statistics, tables. It imports neither torch nor megatron-core."""
