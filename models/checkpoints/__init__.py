"""Published checkpoints in and out: files, layouts, and streaming between them and devices."""
