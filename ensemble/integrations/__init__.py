"""Frameworks whose own loops train members; each module needs its framework, and imports it only when it is used.

- `lightning.fit(member, module)`: a `LightningModule` by a `Trainer`.
- `transformers.MemberTrainer(member, ...)`: a `Trainer` of Hugging Face.
- `accelerate.prepare(member, ...)`: a loop that is written for `Accelerator`.

Each reads the shared pipeline through `member.dataloader`, reports what the framework measures, and keeps the
framework's state in the member's checkpoints.
"""
