"""Converters from the message formats of the large APIs to OpenAI-style chat messages.

Each dialect has functions from JSON to messages (`messages`), the lists of what they read and leave
out (`Contents`), and a conversion of tool definitions (`tools`). They know no log and no harness.
"""
