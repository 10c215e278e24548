"""APIs that harnesses speak, each translated to the engine's chat completions and back.

harness --- POST /v1/messages ---> request_to_chat ---> engine's /v1/chat/completions
harness <-- events or a message -- Blocks <------------ chunks or a chat completion
"""
