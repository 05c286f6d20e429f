"""Text in, text out: HTTP, schemas, tokenizing, streaming. Never imports torch."""
