"""The loop with its changes as code to copy."""

from dataclasses import dataclass

from perflab.bench import machine

from .loop import Loop

STEP = """
def step(batch):
    images, labels = (x.to(device{non_blocking}) for x in batch){on_device}
    optimizer.zero_grad()
    {autocast}loss = F.cross_entropy({forward}(images), labels)
    loss.backward()
    optimizer.step()
    return {result}
"""


@dataclass(frozen=True)
class Listing:
    """Code of a loop; the classes that it names are those of notebook 00 and of `perflab.start.loop`."""

    loop: Loop

    def __repr__(self):
        return "\n".join([*_settings(self.loop), *_loader(self.loop), *_model(self.loop), _step(self.loop)])

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": repr(self), "text/markdown": f"```python\n{self!r}\n```"}


def loop_code(loop: Loop) -> Listing:
    """The loop so far, as code to copy.

    >>> "num_workers" in repr(loop_code(Loop(workers=4)))
    True
    """
    return Listing(loop)


def _settings(loop: Loop) -> list[str]:
    if not loop.tf32:
        return []
    return ["torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True"]


def _loader(loop: Loop) -> list[str]:
    kind = {"full": "Photos", "draft": "DraftPhotos", "stored": "StoredPhotos"}[loop.decode]
    workers = "len(os.sched_getaffinity(0))" if loop.workers == machine.cores() else str(loop.workers)
    options = ["shuffle=True", *([f"num_workers={workers}"] if loop.workers else [])]
    options += ["persistent_workers=True"] if loop.kept else []
    options += [f"prefetch_factor={loop.prefetch}"] if loop.prefetch != 2 else []
    options += ["pin_memory=True"] if loop.pinned else []
    return [
        f"photos = {kind}(photo_paths(), size().side{', as_bytes' if loop.uint8 else ''})",
        f"loader = DataLoader(photos, size().batch, {', '.join(options)})",
    ]


def _model(loop: Loop) -> list[str]:
    lines = ["model = ViT(size().side, size().width, size().depth, size().heads)"]
    if loop.sdpa:
        blocks = "AttentionBlock(size().width, size().heads) for _ in range(size().depth)"
        lines.append(f"model.blocks = nn.Sequential(*[{blocks}])")
    lines.append("model = model.to(device)")
    if loop.compiled:
        mode = ', mode="reduce-overhead"' if loop.graphs else ""
        lines.append(f"compiled = torch.compile(model{mode})")
    fused = ", fused=True" if loop.fused else ""
    return [*lines, f"optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3{fused})", ""]


def _step(loop: Loop) -> str:
    indent = "with torch.autocast(device, torch.bfloat16):\n        " if loop.bf16 else ""
    step = STEP.strip("\n").format(
        non_blocking=", non_blocking=True" if loop.pinned else "",
        on_device="\n    images = normalised(images)" if loop.uint8 else "",
        autocast=indent,
        forward="compiled" if loop.compiled else "model",
        result="loss.item()" if loop.log_every == 1 else "loss",
    )
    batches = "ahead(iter(loader))" if loop.copied_ahead else "loader"
    if loop.log_every in (0, 1):
        return f"{step}\n\n\nfor batch in {batches}:\n    step(batch)"
    each = f"    if number % {loop.log_every} == 0:\n        print(loss.item())"
    return f"{step}\n\n\nfor number, batch in enumerate({batches}, 1):\n    loss = step(batch)\n{each}"
