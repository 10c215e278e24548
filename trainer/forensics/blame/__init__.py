"""Attribute an update to the rows it trained on."""
