"""Subjects: what `lab.subject` asks for, answered by something that burned. One file a kind; torch lazily."""
