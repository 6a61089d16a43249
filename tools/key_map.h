#ifndef FULLSHARD_TOOLS_KEY_MAP_H_
#define FULLSHARD_TOOLS_KEY_MAP_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fullshard {

// How a vision-language model's tensors are called.
//
// kPrismatic   Prismatic VLMs and this repository, module key first:
//              projector.projector.{0,2,4}.*, llm_backbone.llm.*,
//              vision_backbone.featurizer.* or, of two fused towers,
//              vision_backbone.dino_featurizer.* and siglip_featurizer.*
//              (or clip_featurizer.*); LayerScale as timm calls it: ls1.gamma.
// kOpenVla     The Hugging Face form of Prismatic and OpenVLA
//              (PrismaticForConditionalGeneration): projector.fc{1,2,3}.*,
//              language_model.*, vision_backbone.featurizer.* and
//              vision_backbone.fused_featurizer.*; LayerScale ls1.scale_factor.
// kLanguageModel  Hugging Face's causal language model alone: model.layers.*,
//              lm_head.*.
// kVisionTower timm's vision transformer alone: blocks.0.attn.qkv.*.
enum class KeyStyle { kPrismatic, kOpenVla, kLanguageModel, kVisionTower };

// "prismatic", "openvla", "llm", "vision".
absl::string_view key_style_name(KeyStyle style);
absl::StatusOr<KeyStyle> parse_key_style(absl::string_view name);

// Returns the style that the names show, or nullopt: Prismatic and OpenVLA have
// names that no other style has.
std::optional<KeyStyle> recognise_key_style(
    const std::vector<std::string>& names);

struct KeyMapOptions {
  KeyStyle from;
  KeyStyle to;
  // What Prismatic calls the second of two fused towers: "siglip" or "clip".
  std::string fused_tower = "siglip";
};

// Returns each name in the other style; nullopt for one that the other style
// has no place for (the projector in kLanguageModel).
// Errors: InvalidArgument for a name that does not belong to `from`, two names
// that become one, or fused towers where kVisionTower has one.
absl::StatusOr<std::vector<std::optional<std::string>>> map_keys(
    const std::vector<std::string>& names, const KeyMapOptions& options);

}  // namespace fullshard

#endif  // FULLSHARD_TOOLS_KEY_MAP_H_
