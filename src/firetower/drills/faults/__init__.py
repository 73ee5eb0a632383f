"""One file a fault; each exports ``DRILL``. Nothing here imports torch before a variant is built."""
