"""The reference runtime: hybrid models in continuous batches with every sensor on; one burned request burns alone."""
