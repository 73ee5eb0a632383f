"""Facts that were measured, kept as data: what code reads, people can check and correct."""
