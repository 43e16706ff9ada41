"""The prediction on a real pretrained model, SmolLM2-135M-Instruct, against the KL that the step really causes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.smollm2.prepare import gguf_file
from verl_logra import LoGRA
from verl_logra.probe import Probe, ProbeSequence


def test_prediction_is_within_five_percent_at_a_thousandth_of_a_nat():
    folder, source = gguf_file().parent, {"gguf_file": gguf_file().name}
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    chat = [{"role": "user", "content": "Sam has 17 pens and buys 25 more. How many pens has Sam? Explain."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")
    torch.manual_seed(0)
    answer = model.generate(**prompt, max_new_tokens=48, min_new_tokens=48, do_sample=True)[0]
    response = torch.arange(len(answer)) >= prompt["input_ids"].shape[1]

    optimizer = LoGRA(model, {"rank": 64, "kl": {}}, lr=1e-6)
    model(input_ids=answer[None], labels=answer[None]).loss.backward()
    optimizer.propose()
    probe = Probe(model, [ProbeSequence(answer, response)])
    predicted = probe.predict()
    assert predicted.num_tokens == 48
    alpha = (1e-3 / predicted.value) ** 0.5
    probe.remember()
    optimizer.commit(alpha)
    assert probe.kl_since_remembered().value == pytest.approx(1e-3, rel=0.05)
