"""Several GPUs of one host: one process per GPU (a rank), their launcher and watchdog, and their collective bench."""
