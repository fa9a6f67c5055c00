"""Answers without hardware: what a model takes on chips that need not be here, what fits, and how fast it can be.

``python -m jaxpage.plan`` shows it. From config and options to ``scenario`` (shapes of what each device holds), from
there by arithmetic to ``memory`` and ``work``, by the compilers to ``compiled``, and all together to ``report``.
"""
