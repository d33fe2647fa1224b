"""Records transformers' greedy answers of SmolLM2 in float32: python tests/smollm2/record.py DIR, of make.py.

An answer ends before the first token that another might replace after other roundings: its logit must be LEAST_LEAD
above the next.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

FILE = Path(__file__).with_name("transformers.json")
EXAMPLE = Path(__file__).parents[2] / "examples/smollm2"
QUESTIONS, TOKENS, LEAST_LEAD = 24, 24, 0.02


def main(folder: str) -> None:
    sys.path.insert(0, str(EXAMPLE))
    questions = importlib.import_module("prompts").choose_questions(True, QUESTIONS)
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/target")
    model = LlamaForCausalLM.from_pretrained(f"{folder}/target", dtype=torch.float32).eval()
    answers = []
    for _, question in questions:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            found = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        ids = found.sequences[0, prompt.shape[1] :].tolist()
        best = torch.cat(found.logits).topk(2).values
        close = (best[:, 0] - best[:, 1] < LEAST_LEAD).tolist()
        count = close.index(True) if True in close else len(ids)
        answers.append({"question": question, "prompt_ids": prompt[0].tolist(), "token_ids": ids[:count]})
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, answers)) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
