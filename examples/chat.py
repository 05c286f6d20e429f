"""Stream an answer with the official `openai` client. Start `surefoot serve` first; needs `pip install openai`."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Name the four seasons, in one sentence."}],
    temperature=0,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
