"""A run that is under way does what `megascale resize` and `megascale compact` ask of it, between two steps."""

import pytest

from megascale_omni import cli
from megascale_omni.config import ObserveConfig
from megascale_omni.heat.observation import Observation
from megascale_omni.heat.requests import REQUESTS, answers_of, ask, wait_for_answers
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.planes import Plane
from tests.unit.heat.test_heat import QUICK, Kept
from tests.unit.paging.small import SLOT, one_page_a_batch

assert one_page_a_batch is not None  # for every test of this module


class Running(Kept):
    """A run with a report."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.folder = folder / "run"
        self.keeper.close()
        self.observation = Observation(self.pages.manager, heat=QUICK, observe=ObserveConfig(report=str(self.folder)))

    def end_step(self) -> None:
        self.step(range(6))
        self.pages.manager.schedule.end_step()

    def limit(self) -> int | None:
        return self.pages.manager.arena.limit(self.pages.slot_class)

    def answer(self, number: str) -> dict:
        return wait_for_answers(self.folder, number, ranks=1, seconds=0)[0]


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch):
    monkeypatch.setattr("megascale_omni.heat.observation.draw_report", lambda folder: [])


@pytest.fixture
def running(tmp_path):
    found = Running(tmp_path)
    yield found
    found.observation.close()


def test_requests_are_done_in_their_order_when_a_step_has_ended(running):
    ids = [ask(running.folder, what="resize", device=size, host=None) for size in (str(5 * SLOT), "50%")]
    assert running.limit() == 6
    running.end_step()
    assert running.limit() == 3
    assert [running.answer(number)["done"].startswith("pages have") for number in ids] == [True, True]
    running.pages.check()


def test_host_memory_is_asked_for_alone(running):
    pages = running.pages
    pages.manager.resize(Budget(fraction=0.5))
    number = ask(running.folder, what="resize", device=None, host="50%")
    running.end_step()
    assert "done" in running.answer(number)
    assert running.limit() == pages.manager.pager.tiers.host.limit(pages.slot_class) == 3


def test_compaction_is_asked_for(running):
    number = ask(running.folder, what="compact")
    running.end_step()
    assert running.answer(number)["done"].endswith("returned to the system")
    assert running.pages.counts["compactions"] == 1


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"what": "resize", "device": "1%"}, "is too small: the largest group"),
        ({"what": "resize", "device": "lots"}, "device budget='lots' is not a size"),
        ({"what": "resize", "device": "50%", "host": -3}, "host budget=-3 is negative"),
        ({"what": "shrink", "device": "50%"}, "what='shrink' is unknown; ask for resize or compact"),
    ],
)
def test_what_cannot_be_is_refused_and_the_run_goes_on(running, wanted, said):
    number = ask(running.folder, **wanted)
    running.end_step()
    assert said in running.answer(number)["error"]
    assert running.limit() == 6
    running.end_step()


def test_a_line_that_is_being_written_waits_and_a_broken_one_is_told(running, caplog):
    with (running.folder / REQUESTS).open("a") as file:
        file.write('{"id": "a", "what": "com')
        file.flush()
        running.end_step()
        assert not answers_of(running.folder, 0).exists()
        file.write('pact"}\nnonsense\n')
    running.end_step()
    assert "done" in running.answer("a")
    assert "has a line that is no request" in caplog.text


def test_a_line_that_was_cut_off_does_not_swallow_the_next(running):
    with (running.folder / REQUESTS).open("a") as file:
        file.write('{"id": "a", "what": "com')
    number = ask(running.folder, what="compact")
    running.end_step()
    assert "done" in running.answer(number)


def test_no_run_ends_because_its_requests_cannot_be_read_or_answered(running, caplog):
    path, answers = running.folder / REQUESTS, answers_of(running.folder, 0)
    path.mkdir()
    running.end_step()
    running.end_step()
    assert caplog.text.count("cannot be read or answered") == 1, "once"
    path.rmdir()
    path.write_text("[" * 100_000 + "\n")
    answers.mkdir()
    running.end_step()
    assert "has a line that is no request" in caplog.text
    assert f"{answers}: Is a directory" in caplog.text
    answers.rmdir()
    path.unlink()
    number = ask(running.folder, what="resize", device="50%")  # a shorter file
    running.end_step()
    assert "done" in running.answer(number)
    assert running.limit() == 3


def test_requests_to_an_earlier_run_are_not_done(tmp_path):
    (tmp_path / "run").mkdir()
    number = ask(tmp_path / "run", what="compact")
    running = Running(tmp_path)
    running.end_step()
    assert not wait_for_answers(running.folder, number, ranks=1, seconds=0)
    running.observation.close()


def test_while_pages_are_held_a_request_waits_for_them(running):
    numbers = [ask(running.folder, what="resize", **budget) for budget in ({"device": "50%"}, {"host": 0})]
    with running.pages.manager.lease(running.pages.module, Plane.WEIGHT, [0]):
        running.pages.manager.schedule.end_step()
        assert all("when the step at hand has ended" in running.answer(number)["done"] for number in numbers)
        assert running.limit() == 6
    running.pages.manager.schedule.end_step()
    assert running.limit() == 3


def test_the_commands_ask_and_say_what_was_answered(running, capsys, monkeypatch):
    running.end_step()
    monkeypatch.setattr("megascale_omni.heat.requests.time.sleep", lambda seconds: running.end_step())
    folder = str(running.folder)
    assert cli.main(["resize", folder, "--device-budget", "50%"]) == 0
    assert "rank 0, after step" in capsys.readouterr().out
    assert cli.main(["compact", folder]) == 0
    assert "returned to the system" in capsys.readouterr().out
    assert cli.main(["resize", folder, "--device-budget", "1%"]) == 1
    assert "refused: device budget" in capsys.readouterr().out
    for flags, said in (
        ([], "give --device-budget or"),
        (["--device-budget", "x"], "--device-budget='x' is not a size"),
    ):
        assert cli.main(["resize", folder, *flags]) == 1
        assert said in capsys.readouterr().err
    assert cli.main(["compact", folder, "--wait", "0"]) == 1
    assert "0 of 1 ranks of" in capsys.readouterr().err
    running.observation.close()
    assert cli.main(["compact", folder]) == 1
    assert "has ended" in capsys.readouterr().err
