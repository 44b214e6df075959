"""Several GPUs of one host: a process for each ("rank"), the watch over them, the bench that they run together."""
