"""The prompts of benchmarks/depth.py: the easy ones are of files that the embedded pair was trained on."""

from pathlib import Path

from dflash_aot.benchmarks import depth


def test_easy_prompts_are_of_files_that_were_trained_on(corpus):
    files = {Path(module.__file__).name for module in depth.TRAINED_ON}
    assert files <= {path.as_posix() for path in corpus.source_files()}
    assert not [name for name in files if corpus.is_held_out(Path(name))]
