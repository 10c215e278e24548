"""Redaction: secrets and personal data are found in text and token ids, and replaced."""
