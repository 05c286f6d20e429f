"""The process boundary: token ids and events cross it, text and CUDA do not. Only `worker` sees both sides."""
