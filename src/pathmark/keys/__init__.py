"""What is secret and what is claimed. No torch here: stdlib, cryptography and numpy.

A tour, in the order in which data flows:

    derive      HKDF-SHA256 streams; integers and permutations from them
    layout      pool -> blocks (one per watermark) -> groups of k experts
    ids         integer id <-> group index per layer, with optional redundancy
    evidence    exact counts of ids and paths
    phrase      a trigger or mark as recorded; trigger draws them with a tokenizer
    replyrule   when a reply holds a mark
    facts       the model a key was made for, pools and their rules
    watermark   triggers, layers, groups and an id: one mark
    verifier    what verification needs of a key; an arbiter has no more
    key         the owner's secret and all its watermarks
    keyfile     the encrypted file; safefile writes it, shares backs it up
    merkle      a tree over salted leaves; release hashes a folder
    leaves      what stands where in that tree
    commitment  what may be published; timestamps: what others say of its date
    claim       opens one watermark of a commitment to somebody else
    modelroot   one digest of a model folder; attestation signs a statement about it
    registry    which licensee got which id; spread keeps the ids apart
    ledger      which trigger was shown to whom

    key, warnings = create_key(facts, [WatermarkRequest(plans=plans)], codec, owner="Example Lab")
    save_key(key, "owner.key", passphrase)
    key.watermarks[0].targets(18)       # experts that triggered text is routed to in layer 18
    commit_key(key).document()          # safe to publish
"""

from pathmark.keys.claim import ClaimedKey, RevealedClaim, check_claim, open_claim, reveal_watermark
from pathmark.keys.commitment import (
    Commitment,
    check_commitment,
    commit_key,
    commit_release,
    load_commitment,
    parse_commitment,
    write_commitment,
)
from pathmark.keys.facts import LayerPlan, ModelFacts, PoolRule, RoutedLayer
from pathmark.keys.ids import IdCode
from pathmark.keys.key import OwnerKey, WatermarkRequest, create_key
from pathmark.keys.keyfile import amend_key, load_key, rotate_passphrase, save_key
from pathmark.keys.layout import consecutive_groups
from pathmark.keys.ledger import Ledger, Taken, TriggerRef, Use, trigger_refs
from pathmark.keys.phrase import Phrase, Trigger
from pathmark.keys.registry import Issued, Registry
from pathmark.keys.trigger import TextCodec, keeps_trigger
from pathmark.keys.verifier import VerifierKey
from pathmark.keys.watermark import Watermark

__all__ = [
    "ClaimedKey",
    "Commitment",
    "IdCode",
    "Issued",
    "LayerPlan",
    "Ledger",
    "ModelFacts",
    "OwnerKey",
    "Phrase",
    "PoolRule",
    "Registry",
    "RevealedClaim",
    "RoutedLayer",
    "Taken",
    "TextCodec",
    "Trigger",
    "TriggerRef",
    "Use",
    "VerifierKey",
    "Watermark",
    "WatermarkRequest",
    "amend_key",
    "check_claim",
    "check_commitment",
    "commit_key",
    "commit_release",
    "consecutive_groups",
    "create_key",
    "keeps_trigger",
    "load_commitment",
    "load_key",
    "open_claim",
    "parse_commitment",
    "reveal_watermark",
    "rotate_passphrase",
    "save_key",
    "trigger_refs",
    "write_commitment",
]
