"""Explain finished runs: audit a dataset, blame an update, replay it. No other part knows them."""
