"""verl's V1 trainers, under names of their own, that keep their rollouts.

Put this file on PYTHONPATH, and start training with

    VERL_USE_EXTERNAL_MODULES=verl_trainers python -m verl.trainer.main_ppo \
        trainer.v1.trainer_mode=recorded_sync trainer.rollout_data_dir=/data/rollouts ...
"""

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSync, register_trainer

from rollout_io.hooks.verl import recorded

register_trainer("recorded_sync")(recorded(PPOTrainerSync))
register_trainer("recorded_colocate_async")(recorded(PPOTrainerColocateAsync))
