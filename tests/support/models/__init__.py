"""A stand-in of the APIs of language models, for agents that run without a network and without a key.

It speaks OpenAI Chat Completions, OpenAI Responses and Anthropic Messages, streamed or whole, with tool calls. What it
answers is written in the last message of the user; `script.py` lists the words. Nothing is random, and nothing is
remembered but how often a message was made to fail.

    python -m tests.support.models --port 8080

A base URL may carry a name before `/v1`: of requests to `http://127.0.0.1:8080/anna/v1` the log at `/anna/_log` tells.
"""
