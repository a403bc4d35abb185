"""The settings of outcomes: ``[outcomes]`` and ``[outcomes.judge]``."""

from pydantic import Field

from traced.llm.settings import BaseUrl, Variable
from traced.section import Margin, Positive, Section, Temperature


class JudgeSection(Section):
    """A model that says how a conversation went; it counts once its agreement with labels is measured and enough."""

    model: str = Field(default="", description='model that judges, as its server calls it; "" is no judge')
    base_url: BaseUrl = Field(default="", description='its server, e.g. "http://127.0.0.1:8000/v1"; "" is OpenAI\'s')
    api_key_env: Variable = Field(default="OPENAI_API_KEY", description="environment variable that holds its API key")
    prompt: str = Field(default="", description='file with other instructions for it; "" is the built-in ones')
    temperature: Temperature = Field(default=0.0, description="sampling temperature")
    timeout_s: float = Field(default=60.0, gt=0, description="seconds for one answer")
    concurrency: Positive = Field(default=4, description="conversations judged at once")
    per_minute: int = Field(default=0, ge=0, description="requests a minute; 0 is no limit")
    max_characters: Positive = Field(
        default=100_000, description="longest conversation that is judged; longer ones stay unknown"
    )
    min_agreement: Margin = Field(default=0.6, description="least agreement with labels (Cohen's kappa)")
    min_labels: Positive = Field(default=30, description="fewest labelled conversations that measure it")


class OutcomesSection(Section):
    """Who says whether a conversation went well where nobody gave feedback."""

    rules: str = Field(default="", description='file of rules (traced outcomes check FILE); "" is none')
    judge: JudgeSection = Field(default=JudgeSection(), description="the judge")
