"""Ask a chat model one question through Transformers. Nothing of secure_loader is imported: ``loader=`` is enough.

python examples/ask_transformers.py FOLDER [LOADER]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = "What is the capital of France?"

folder = sys.argv[1]
options = {"loader": sys.argv[2]} if len(sys.argv) > 2 else {}

model = AutoModelForCausalLM.from_pretrained(folder, **options)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
