"""Which slots a query reads."""
