"""``trainer_trace`` with a planning process that is awaited first, so that every step it can plan ahead is.

The metrics of a step gain ``planned_in_place``: plans this process has made itself so far.
"""

from harts_titan import engine, preparation, train
from tests.integration import trainer_trace


def main() -> None:
    made = []
    make_plan, update, init = preparation.make_plan, engine.Engine.update, train.HartsTrainer.__init__

    def counted_plan(*arguments, **options):
        made.append(None)
        return make_plan(*arguments, **options)

    def counted_update(self, batch):
        return update(self, batch) | {"planned_in_place": float(len(made))}

    def ready_init(self, config):
        init(self, config)
        if config.tree.plan_in_background:
            self.engine.start_planner().wait_until_ready()

    preparation.make_plan, engine.Engine.update, train.HartsTrainer.__init__ = counted_plan, counted_update, ready_init
    trainer_trace.main()


if __name__ == "__main__":
    main()
