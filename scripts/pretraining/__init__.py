"""How the bundled model is made: its tokenizer, its training text and its pre-training. The weights lie in assets/."""
