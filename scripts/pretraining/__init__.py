"""How the bundled model is made: tokenizer, training text and pre-training. The weights are in ``assets/``."""
