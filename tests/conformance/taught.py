"""The example model, taught the chats of chats.yaml by heart.

The programs try a server, but some of their cases need a model that ends its answers and calls tools of its own accord.
To anything else this one answers with parts of what it was taught.

Usage: taught.py CHECKPOINT OUT
"""

import json
import sys
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
STEPS, RATE, BATCH = 240, 1e-3, 8
LONGEST = 65536  # positions: a terminal's agent sends 20,000 tokens, of which the model makes nothing
NOT_LEARNT = -100  # a label that transformers leaves out of the loss


def tool(name, description, arguments):
    """A tool as chats have it, with arguments by name and JSON type, all of them required."""
    schema = {"type": "object", "properties": {k: {"type": v} for k, v in arguments.items()}, "required": [*arguments]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def rendered(tokenizer, template):
    """The token ids of each chat and of its answer, which ends the text."""
    given = yaml.safe_load((HERE / "chats.yaml").read_text())
    tools = {name: tool(name, **said) for name, said in given["tools"].items()}
    rows = []
    for chat in given["chats"]:
        prompt = tokenizer.apply_chat_template(
            [{"role": role, "content": words} for role, words in chat["turns"]],
            tools=[tools[name] for name in chat.get("tools", ())] or None,
            chat_template=template, tokenize=False, add_generation_prompt=True,
        )  # fmt: skip
        answer = chat["answer"]
        if isinstance(answer, dict):
            ((name, arguments),) = answer.items()
            call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            answer = f"<tool_call>\n{call}\n</tool_call>"
        rows.append((tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]))
    return rows


def main(checkpoint, out):
    """Write a copy of a checkpoint that knows the chats into a folder. It takes minutes."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    rows = rendered(tokenizer, (HERE / "chat.jinja").read_text())
    longest = max(len(asked) + len(said) for asked, said in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels, mask = torch.full_like(ids, NOT_LEARNT), torch.zeros_like(ids)
    for i, (asked, said) in enumerate(rows):
        begin, end = len(asked), len(asked) + len(said)
        ids[i, :end] = torch.tensor(asked + said)
        labels[i, begin:end] = ids[i, begin:end]
        mask[i, :end] = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(1, STEPS + 1):
        some = torch.randperm(len(rows))[:BATCH]
        loss = model(input_ids=ids[some], attention_mask=mask[some], labels=labels[some]).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 80 == 0:
            print(f"chats, step {step}: {loss.item():.4f} nats a token", flush=True)
    model.config.max_position_embeddings = LONGEST
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
