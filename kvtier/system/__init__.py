"""What kvtier asks of the operating system: files that appear whole, limits of open files, child processes, logs."""
