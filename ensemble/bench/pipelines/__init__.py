"""`ensemble bench pipelines`: what one shared data pipeline saves, after Pittman et al., SC18."""
