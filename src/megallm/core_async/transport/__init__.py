"""How plans reach the ranks and results come back."""
