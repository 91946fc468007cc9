"""The command line with real runs: mistakes in the workdir and at a resume, and how runs end."""

import json
import shutil

import pytest

from haikutrain import main
from haikutrain.checkpoint import Checkpointer
from haikutrain.checkpoint_folder import list_steps


def contents(folder):
    """Every file below a folder, and what is in it."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def data(dataset, name="train_data"):
    return f"""
class Run(Base):
    def {name}(self):
        return {dataset}
"""


# --- mistakes in the workdir -----------------------------------------------------------------


def test_workdir_must_be_a_folder_that_can_be_written(run_plain, check_refused, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    check_refused(run_plain(workdir=file), "workdir", str(file), "is a file", "--workdir")
    for path, blamed in [(file / "below" / "run", file), ("/proc/haikutrain/run", "/proc")]:
        result = run_plain(workdir=path)
        check_refused(result, f"workdir {path} cannot be written", f": {blamed})", "--workdir")
    assert file.read_text() == "mine"


@pytest.fixture(scope="module")
def stopped(configs, tmp_path_factory):
    """The workdir of a run of 4 steps that was stopped at step 2."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copy(configs / "plain.py", folder / "run.py")
    argv = [f"--config={folder}/run.py", f"--workdir={folder}/work", "--config.stop_after=2"]
    assert main.run(argv) == 0
    assert list_steps(folder / "work" / "checkpoints") == [2]
    return folder / "work"


WIDER = data("ArrayDataset({**arrays(20), 'y': arrays(20)['x']}, 8, seed=0)")
OTHER_OPTIMIZER = """
class Run(Base):
    def optimizer(self):
        return optax.sgd(1e-2)
"""


@pytest.mark.parametrize(
    "source, flags, expected",
    [
        (
            "",
            ["--config.batch_size=16", "--config.seed=1"],
            ["batch_size (8 -> 16)", "seed (0 -> 1)", "another workdir"],
        ),
        ("", ["--config.ema_decay=0.5"], ["ema_decay (null -> 0.5)"]),
        ("", ["--config.rows=24"], ["train_data has changed", "examples was 20 and is 24"]),
        (WIDER, [], ["row was {'label': 'int32[]', 'x': 'float32[3]'}", "'y': 'float32[3]'"]),
        (
            "",
            ["--config.width=6"],
            [
                "params/linear/w is float32[3,4] in the checkpoint and float32[3,6] in the",
                "params/linear/b is",
                "params/batch_norm/scale is",
                "params/batch_norm/offset is",
                "params/linear_1/w is float32[4,2] in the checkpoint and float32[6,2] in the",
                "network_state/batch_norm/~/mean_ema/average is",
                "opt_state/0/mu/linear/w is",
            ],
        ),
        (OTHER_OPTIMIZER, [], ["opt_state/0/nu/linear/b (float32[4] in the checkpoint) is not in"]),
        ("\n\nclass Other(Run): ...\n", ["--config.experiment=:Other"], ["run:Run", "run:Other"]),
    ],
)
def test_resume_that_cannot_be_exact_is_refused_and_changes_nothing(
    run_plain, check_refused, stopped, tmp_path, source, flags, expected
):
    workdir = tmp_path / "work"
    shutil.copytree(stopped, workdir)
    before = contents(workdir)
    result = run_plain(*flags, source=source)
    check_refused(result, *expected)
    # Of the 31 leaves the width is in 5 of params, 10 of Adam's and 4 of the moving averages.
    different = result[2].count(" in the checkpoint and ")
    assert different == (19 if "--config.width=6" in flags else 0)
    assert contents(workdir) == before


def test_checkpoint_of_another_experiment_is_refused_without_config_json_too(
    run_plain, check_refused, stopped, tmp_path
):
    shutil.copytree(stopped / "checkpoints", tmp_path / "work" / "checkpoints")
    other = "\n\nclass Other(Run): ...\n"
    result = run_plain("--config.experiment=:Other", source=other)
    check_refused(result, "run:Run", "run:Other", "--workdir")
    assert not (tmp_path / "work" / "config.json").exists()


# --- how runs end ----------------------------------------------------------------------------


def test_finished_run_says_so_and_raising_num_steps_reopens_it(
    run_plain, log_lines, tmp_path, caplog
):
    workdir = tmp_path / "work"
    code, out, _ = run_plain()
    assert code == 0
    assert "finished at step 4" in out
    before = contents(workdir)
    caplog.clear()
    code, out, err = run_plain()
    assert (code, err) == (0, "")
    assert "finished at step 4" in out
    assert "is finished: step 4 of 4; raise num_steps to train on" in caplog.text
    assert contents(workdir) == before

    assert run_plain("--config.num_steps=6")[0] == 0
    assert [line["step"] for line in log_lines(workdir, "train")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in log_lines(workdir, "eval")] == [4, 6]
    lines = (workdir / "metrics.jsonl").read_bytes()
    assert lines.startswith(before[workdir / "metrics.jsonl"])
    assert run_plain("--config.num_steps=6")[0] == 0
    assert (workdir / "metrics.jsonl").read_bytes() == lines


def test_run_ended_by_a_hook_stays_ended(run_plain, log_lines, tmp_path, caplog):
    workdir = tmp_path / "work"
    source = """
class Run(Base):
    def hooks(self):
        return [haikutrain.every(3, lambda info: info.stop("good enough"))]
"""
    flags = ["--config.num_steps=8", "--config.log_every=2"]
    assert run_plain(*flags, source=source)[0] == 0
    assert [line["step"] for line in log_lines(workdir, "train")] == [2, 3]
    assert [line["step"] for line in log_lines(workdir, "eval")] == [3]
    checkpointer = Checkpointer(workdir / "checkpoints", read_only=True)
    assert checkpointer.steps() == [2, 3]
    assert [checkpointer.read_meta(step)["ended"] for step in (2, 3)] == [None, "good enough"]

    before = contents(workdir)
    caplog.clear()
    code, out, err = run_plain(*flags, source=source)
    assert (code, err) == (0, "")
    assert "to resume" not in out
    assert "has ended at step 3 (good enough); raise num_steps to train on" in caplog.text
    assert contents(workdir) == before
    assert run_plain("--config.num_steps=10", "--config.log_every=2", source=source)[0] == 0
    assert checkpointer.latest_step() == 6


def test_eval_mode_finds_checkpoints_and_appends_what_it_finds(
    run_plain, check_refused, log_lines, tmp_path
):
    workdir, judged = (
        tmp_path / "work",
        ["--config.best_metric=a/loss", "--config.keep_checkpoints=1"],
    )
    source = data(
        "{'a': ArrayDataset(arrays(10), 4), 'b': ArrayDataset(arrays(3), 4)}", "eval_data"
    )
    assert run_plain(*judged, "--config.eval_every=2", source=source)[0] == 0
    lines = {(line["step"], split): line for split in "ab" for line in log_lines(workdir, split)}
    assert lines.keys() == {(2, "a"), (4, "a"), (2, "b"), (4, "b")}
    # The higher the better here, so that the best is not the newest, which alone is kept besides.
    assert lines[2, "a"]["loss"] > lines[4, "a"]["loss"]
    before = contents(workdir)

    asked = [("latest", 4), ("best", 2), ("2", 2), (None, 4)]
    for checkpoint, step in asked:
        flags = [f"--checkpoint={checkpoint}"] if checkpoint else []
        code, out, err = run_plain("--mode=eval", *flags, *judged, source=source)
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            f"{split} {name} {lines[step, split][name]:.6g}"
            for split in "ab"
            for name in ("accuracy", "loss")
        ]
    found = (workdir / "metrics_eval.jsonl").read_text().splitlines()
    expected = [lines[step, split] for _, step in asked for split in "ab"]
    assert [json.loads(line) for line in found] == expected
    after = contents(workdir)
    del after[workdir / "metrics_eval.jsonl"]
    assert after == before

    missing = run_plain("--mode=eval", "--checkpoint=3", *judged, source=source)
    check_refused(missing, "no checkpoint of step 3", "there are 2, 4")
    unjudged = run_plain("--mode=eval", "--checkpoint=best", source=source)
    check_refused(unjudged, "no checkpoint", "best_metric")
    nowhere = run_plain("--mode=eval", workdir=tmp_path / "nowhere", source=source)
    check_refused(nowhere, "there is no checkpoint in", "nowhere")
    assert not (tmp_path / "nowhere").exists()
    assert (workdir / "metrics_eval.jsonl").read_text().splitlines() == found


# --- as processes ----------------------------------------------------------------------------


def test_processes_say_in_one_line_what_is_wrong_and_what_is_done(
    main, configs, check_refused, tmp_path
):
    plain = (configs / "plain.py").read_text()
    file, workdir = tmp_path / "run.py", tmp_path / "work"
    flags = [f"--config={file}", f"--workdir={workdir}", "--cpu_devices=4"]

    file.write_text(plain + data("(arrays(8) for _ in range(100))"))
    done = main(*flags, check=False)
    check_refused((done.returncode, done.stdout, done.stderr), "generator", "get_state")
    assert not workdir.exists()

    file.write_text(plain)
    main(*flags)
    before = contents(workdir)
    done = main(*flags)
    assert done.stderr.count("\n") == 1
    assert "is finished: step 4 of 4; raise num_steps to train on" in done.stderr
    done = main(*flags, "--config.batch_size=16", check=False)
    check_refused((done.returncode, done.stdout, done.stderr), "batch_size (8 -> 16)")
    assert contents(workdir) == before
