"""How the small model that ships with Firetower is made: text, grammar, tokenizer, training, evaluation."""
