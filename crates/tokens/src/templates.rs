//! The templates of a model: which one a request uses, and with which variables.

use minijinja::value::{Value, ValueKind};

use crate::conversation::{Conversation, MARK, read_tools};
use crate::files::{Source, TokenizerConfig};
use crate::json::{self, member, members};
use crate::template::{Template, trim, trim_end};
use crate::{Chat, Error, Partial};

/// Marks the end of the last message while it is rendered, to cut there.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Parameters of `apply_chat_template` that a request's kwargs would set: no template variables.
const PARAMETERS: [&str; 8] = [
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "continue_final_message",
];

/// Names that a request must not set through its kwargs.
const REFUSED: [&str; 4] = ["chat_template", "tokenize", "conversation", "messages"];

#[derive(Debug, Default)]
pub(crate) struct Templates {
    list: Vec<(String, Template)>,
    problem: Option<Error>,
}

/// A chat as text.
#[derive(Debug)]
pub(crate) struct Rendered {
    pub(crate) text: String,
    /// Set when there are parts that are no text: what they are, and the byte at which the prompt
    /// is no longer known.
    pub(crate) partial: Option<(Partial, usize)>,
}

impl Templates {
    pub(crate) fn compile(sources: &[Source]) -> Templates {
        let mut templates = Templates::default();
        for source in sources {
            let called = source.file.display().to_string();
            match Template::compile(&called, &source.text) {
                Ok(template) => templates.list.push((source.name.clone(), template)),
                Err(e) => templates.problem = Some(e),
            }
        }
        templates
    }

    pub(crate) fn any(&self) -> bool {
        !self.list.is_empty()
    }

    pub(crate) fn problem(&self) -> Option<&Error> {
        self.problem.as_ref()
    }

    fn choose(&self, with_tools: bool) -> Result<&Template, Error> {
        let named = |name: &str| self.list.iter().find(|(n, _)| n == name).map(|(_, t)| t);
        let processor = if with_tools { None } else { named(Source::PROCESSOR) };
        let tool_use = if with_tools { named(Source::TOOL_USE) } else { None };
        let found = processor.or(tool_use).or_else(|| named(Source::DEFAULT));
        match (found.or_else(|| named(Source::PROCESSOR)), &self.problem) {
            (Some(template), _) => Ok(template),
            (None, Some(Error::Template { template, what })) => {
                Err(Error::Template { template: template.clone(), what: what.clone() })
            }
            (None, _) => Err(Error::NoTemplate),
        }
    }

    /// Renders a request's chat.
    pub(crate) fn render(
        &self,
        chat: &Chat<'_>,
        config: &TokenizerConfig,
    ) -> Result<Rendered, Error> {
        let variables = Variables::read(chat)?;
        let template = self.choose(variables.tools.is_some())?;
        let mut conversation = Conversation::parse(chat.messages, template.format)?;
        if !template.developer {
            conversation = conversation.without_developer_role();
        }
        let continued = match chat.continue_final_message {
            true => Some(tag_last(&mut conversation, chat, template)?),
            false => None,
        };
        let render = |mark: bool| {
            let messages = conversation.to_value(mark);
            let text = template.render(variables.all(config, messages), chat.now)?;
            match &continued {
                None => Ok(text),
                Some(last) => cut_at_tag(text, last, template),
            }
        };
        let text = render(false)?;
        let Some(partial) = conversation.partial else {
            return Ok(Rendered { text, partial: None });
        };
        let marked = render(true)?;
        let end = common_prefix(&text, marked.split(MARK).next().unwrap_or_default());
        Ok(Rendered { text, partial: Some((partial, end)) })
    }
}

/// The variables of a request beside its messages.
struct Variables {
    tools: Option<Value>,
    rest: Vec<(String, Value)>,
}

impl Variables {
    fn read(chat: &Chat<'_>) -> Result<Variables, Error> {
        let mut tools = read_tools(chat.tools)?;
        let kwargs = json::parse_opt(chat.chat_template_kwargs, "chat_template_kwargs")?;
        let kwargs = kwargs.unwrap_or_else(|| json::object::<&str>([]));
        if !json::is_object(&kwargs) {
            return Err(Error::request("chat_template_kwargs", "must be an object"));
        }
        let effort = json::parse_opt(chat.reasoning_effort, "reasoning_effort")?;
        let mut rest = vec![
            ("add_generation_prompt".to_owned(), Value::from(chat.add_generation_prompt)),
            ("documents".to_owned(), Value::from(())),
        ];
        if let Some(effort) = &effort
            && member(&kwargs, "enable_thinking").is_none()
            && json::raw_member(&kwargs, "enable_thinking").is_none()
        {
            let thinks = effort.as_str() != Some("none");
            rest.push(("enable_thinking".to_owned(), Value::from(thinks)));
        }
        for (key, value) in members(&kwargs) {
            if REFUSED.contains(&key.as_str()) {
                let place = format!("chat_template_kwargs.{key}");
                return Err(Error::request(&place, "cannot be set"));
            }
            if PARAMETERS.contains(&key.as_str()) || key == "add_generation_prompt" || unset(&value)
            {
                continue;
            }
            match key.as_str() {
                "tools" => tools = Some(value),
                _ => rest.push((key, value)),
            }
        }
        if let Some(documents) = json::parse_opt(chat.documents, "documents")? {
            rest.push(("documents".to_owned(), documents));
        }
        rest.extend(effort.filter(|e| !unset(e)).map(|e| ("reasoning_effort".to_owned(), e)));
        Ok(Variables { tools, rest })
    }

    /// All of them, later ones over earlier ones.
    fn all(&self, config: &TokenizerConfig, messages: Value) -> Vec<(String, Value)> {
        let tokens = config.named_tokens.iter();
        let mut all: Vec<_> = tokens.map(|(k, v)| (k.clone(), Value::from(v.as_str()))).collect();
        all.extend(self.rest.iter().cloned());
        all.push(("tools".to_owned(), self.tools.clone().unwrap_or_else(|| Value::from(()))));
        all.push(("messages".to_owned(), messages));
        all
    }
}

/// Values of kwargs that vLLM takes as not given.
fn unset(value: &Value) -> bool {
    value.is_none() || (value.kind() == ValueKind::String && value.as_str() == Some("auto"))
}

fn tag_last(
    conversation: &mut Conversation,
    chat: &Chat<'_>,
    template: &Template,
) -> Result<String, Error> {
    let place = "continue_final_message";
    if chat.add_generation_prompt {
        return Err(Error::request(place, "cannot be set together with add_generation_prompt"));
    }
    if !template.reads_content {
        return Err(template.error("does not read the content that is to be continued"));
    }
    conversation
        .tag_last(CONTINUE_TAG)
        .ok_or_else(|| Error::request(place, "the final message has no text to continue"))
}

/// The text up to the tag, as transformers cuts it.
fn cut_at_tag(mut text: String, last: &str, template: &Template) -> Result<String, Error> {
    let tag = CONTINUE_TAG.trim_end();
    let Some(at) = text.rfind(tag).filter(|_| text.contains(trim(last))) else {
        return Err(template.error("leaves out the final message that is to be continued"));
    };
    let spaced = text[at..].starts_with(CONTINUE_TAG);
    text.truncate(at);
    if !spaced {
        text.truncate(trim_end(&text).len());
    }
    Ok(text)
}

/// Bytes at the start that are the same in both, up to a whole character.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(x, y)| x == y).map(|(x, _)| x.len_utf8()).sum()
}
