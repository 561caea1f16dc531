//! vLLM with NixlConnector.

use super::{Failure, Handoff, LegContext, LegRequest, Prefill, Request, Verdict, Vllm, verdict};

impl Vllm {
    pub(super) fn prefill_leg(&self, request: &Request, leg: &LegContext<'_>) -> LegRequest {
        self.local_leg(request, leg)
    }

    pub(super) fn decode_leg(
        &self,
        request: &Request,
        handoff: Handoff,
        leg: &LegContext<'_>,
    ) -> LegRequest {
        drop(handoff);
        self.local_leg(request, leg)
    }

    pub(super) fn local_leg(&self, request: &Request, _leg: &LegContext<'_>) -> LegRequest {
        LegRequest { body: request.body.bytes().clone(), headers: vec![] }
    }

    pub(super) fn read_prefill(
        &self,
        status: u16,
        _body: &[u8],
        exact_tokens: Option<u32>,
    ) -> Prefill {
        match verdict(status) {
            Verdict::Client(status) => Prefill::ClientError(status),
            Verdict::Failed(failure) => Prefill::Failed(failure, None),
            Verdict::Ok if exact_tokens == Some(0) => {
                Prefill::Failed(Failure::Protocol("empty prompt"), None)
            }
            Verdict::Ok => Prefill::Handoff(Handoff {
                params: String::new(),
                remote_engine_id: None,
                prompt_tokens: None,
                lease_ms: self.lease_ms,
            }),
        }
    }

    pub(super) fn release(&self, _model: &str, handoff: Handoff) -> (&'static str, LegRequest) {
        ("/v1/completions", LegRequest { body: handoff.params.into(), headers: vec![] })
    }
}
