"""The viewer: a local server and page that show a dataset or a run token by token."""
