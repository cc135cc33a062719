"""Train a small Qwen3-MoE from text: how the model in this folder was made, and how to make another.

    python examples/train.py --text my-text.jsonl --text more.txt -o my-model --steps 4000

The defaults give the shape of examples/mini-qwen3-moe (4 layers, 16 experts, top-2, 2.3 M parameters), which took about
8 M tokens. A byte-level BPE tokenizer is trained on the same text. Two CPU cores do about 10,000 tokens a second.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moepack.calibrate.text.documents import documents

END = "<|endoftext|>"
CHAT = (  # so that `moepack chat` can be tried: the model was trained on no chats
    "{%- for message in messages -%}\n{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor -%}\n"
    "{%- if add_generation_prompt -%}\nAssistant:\n{%- endif -%}\n"
)


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, **special)


def main() -> None:
    """Parse arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="append", required=True, help=".txt, .jsonl, .parquet, or a Hub data set")
    parser.add_argument("-o", "--output", type=Path, required=True, help="where the model goes")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--expert-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--balance", type=float, default=0.002, help="weight of the balancing loss: low keeps skew")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    texts = [text for source in args.text for text in documents(source) if isinstance(text, str)]
    tokenizer = train_tokenizer(texts, args.vocabulary)
    stream = [i for text in texts for i in [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]]
    windows = torch.tensor(stream[: len(stream) // args.length * args.length]).view(-1, args.length)
    if not len(windows):
        parser.error(f"the text has {len(stream)} tokens, less than one window of {args.length}")
    print(f"{len(windows)} windows of {args.length} tokens")

    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        moe_intermediate_size=args.expert_size,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=args.balance,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, min(100, args.steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1, step / args.steps)))),
    )
    model.train()
    began = time.monotonic()
    for step in range(args.steps):
        ids = windows[torch.randint(len(windows), (args.batch,))]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            rate = (step + 1) * ids.numel() / (time.monotonic() - began)
            print(f"step {step + 1}: loss {loss.item():.3f}, {rate:,.0f} tokens/s", flush=True)
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
