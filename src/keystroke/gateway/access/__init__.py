"""Who may come in and how much they may use: keys, origins, budgets."""
