"""Export rollouts as data for supervised and preference training: samples, pairs, chats."""
