"""Reads what `/metrics` gives, as Prometheus does."""

from prometheus_client.parser import text_string_to_metric_families


def samples_of(body: bytes) -> dict[str, float]:
    """Gives each series' value by its name and its labels, without the model's: `name{part=plan}`."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items() if key != "model_name")
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples
