"""Load from outside on any OpenAI-compatible server, and what its users would see. Knows nothing of our engine.

jaxpage bench serve --dataset-name random --request-rate 4 --num-prompts 200 --plot run.png
"""
