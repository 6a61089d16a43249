#include "fullshard/tools/key_map.h"

#include <unordered_map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

using Name = std::optional<std::string>;

// A prefix in Prismatic's style and in OpenVLA's.
struct PrefixPair {
  std::string prismatic;
  std::string openvla;
};

constexpr KeyStyle kStyles[] = {KeyStyle::kPrismatic, KeyStyle::kOpenVla,
                                KeyStyle::kLanguageModel,
                                KeyStyle::kVisionTower};
constexpr char kLlm[] = "llm_backbone.llm.";
constexpr char kTower[] = "vision_backbone.featurizer.";
constexpr char kFusedTower[] = "vision_backbone.fused_featurizer.";
constexpr char kDino[] = "vision_backbone.dino_featurizer.";
// Transformers renames whatever ends in `gamma`, so the Hugging Face form
// avoids it.
constexpr absl::string_view kGamma = "gamma";
constexpr absl::string_view kScaleFactor = "scale_factor";

std::vector<PrefixPair> prefixes(bool is_fused, const std::string& fused) {
  std::vector<PrefixPair> pairs = {{"projector.projector.0.", "projector.fc1."},
                                   {"projector.projector.2.", "projector.fc2."},
                                   {"projector.projector.4.", "projector.fc3."},
                                   {kLlm, "language_model."}};
  if (is_fused) {
    pairs.push_back({kDino, kTower});
    pairs.push_back(
        {absl::StrCat("vision_backbone.", fused, "_featurizer."), kFusedTower});
  } else {
    pairs.push_back({kTower, kTower});
  }
  return pairs;
}

// "...blocks.3.ls1.gamma" as "...blocks.3.ls1.scale_factor", and back.
std::string rename_layer_scale(std::string name, absl::string_view from,
                               absl::string_view to) {
  absl::string_view stem = name;
  if (absl::ConsumeSuffix(&stem, from) &&
      (absl::EndsWith(stem, ".ls1.") || absl::EndsWith(stem, ".ls2."))) {
    return absl::StrCat(stem, to);
  }
  return name;
}

Name replace_prefix(const std::string& name, const std::string& from,
                    const std::string& to) {
  if (!absl::StartsWith(name, from)) return std::nullopt;
  return to + name.substr(from.size());
}

class KeyMap {
 public:
  KeyMap(const std::vector<std::string>& names, const KeyMapOptions& options)
      : options_(options) {
    std::string fused = options.fused_tower;
    for (const std::string& name : names) {
      is_fused_ = is_fused_ || absl::StartsWith(name, kDino) ||
                  absl::StartsWith(name, kFusedTower);
      if (absl::StartsWith(name, "vision_backbone.clip_featurizer.")) {
        fused = "clip";
      }
    }
    prefixes_ = prefixes(is_fused_, fused);
  }

  bool is_fused() const { return is_fused_; }

  // Nullopt: the name is not of the style `from`.
  Name to_prismatic(const std::string& name) const {
    switch (options_.from) {
      case KeyStyle::kPrismatic:
        return belongs_to_prismatic(name) ? Name(name) : std::nullopt;
      case KeyStyle::kOpenVla:
        for (const PrefixPair& pair : prefixes_) {
          if (Name mapped =
                  replace_prefix(name, pair.openvla, pair.prismatic)) {
            return rename_layer_scale(*mapped, kScaleFactor, kGamma);
          }
        }
        return std::nullopt;
      case KeyStyle::kLanguageModel:
        return kLlm + name;
      case KeyStyle::kVisionTower:
        return kTower + name;
    }
    return std::nullopt;
  }

  // Nullopt: the style `to` has no place for it.
  Name from_prismatic(const std::string& name) const {
    switch (options_.to) {
      case KeyStyle::kPrismatic:
        return name;
      case KeyStyle::kOpenVla:
        for (const PrefixPair& pair : prefixes_) {
          if (Name mapped =
                  replace_prefix(name, pair.prismatic, pair.openvla)) {
            return rename_layer_scale(*mapped, kGamma, kScaleFactor);
          }
        }
        return std::nullopt;
      case KeyStyle::kLanguageModel:
        return replace_prefix(name, kLlm, "");
      case KeyStyle::kVisionTower:
        return replace_prefix(name, kTower, "");
    }
    return std::nullopt;
  }

 private:
  static bool belongs_to_prismatic(const std::string& name) {
    for (const char* module :
         {"vision_backbone.", "projector.", "llm_backbone."}) {
      if (absl::StartsWith(name, module)) return true;
    }
    return false;
  }

  const KeyMapOptions options_;
  bool is_fused_ = false;
  std::vector<PrefixPair> prefixes_;
};

}  // namespace

absl::string_view key_style_name(KeyStyle style) {
  switch (style) {
    case KeyStyle::kPrismatic:
      return "prismatic";
    case KeyStyle::kOpenVla:
      return "openvla";
    case KeyStyle::kLanguageModel:
      return "llm";
    case KeyStyle::kVisionTower:
      return "vision";
  }
  return "";
}

absl::StatusOr<KeyStyle> parse_key_style(absl::string_view name) {
  for (const KeyStyle style : kStyles) {
    if (name == key_style_name(style)) return style;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown key style \"", name,
                   "\", expected prismatic, openvla, llm or vision"));
}

std::optional<KeyStyle> recognise_key_style(
    const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (absl::StartsWith(name, "projector.projector.") ||
        absl::StartsWith(name, kLlm)) {
      return KeyStyle::kPrismatic;
    }
    if (absl::StartsWith(name, "projector.fc") ||
        absl::StartsWith(name, "language_model.")) {
      return KeyStyle::kOpenVla;
    }
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<std::optional<std::string>>> map_keys(
    const std::vector<std::string>& names, const KeyMapOptions& options) {
  const KeyMap map(names, options);
  if (options.to == KeyStyle::kVisionTower && map.is_fused()) {
    return absl::InvalidArgumentError(
        "two fused vision towers, expected one: the style \"vision\" has no "
        "names for a second");
  }
  std::vector<Name> mapped;
  std::unordered_map<std::string, std::string> taken;
  for (const std::string& name : names) {
    const Name prismatic = map.to_prismatic(name);
    if (!prismatic.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", name, "\" has no name of the style ",
                       key_style_name(options.from)));
    }
    Name result = map.from_prismatic(*prismatic);
    if (!result.has_value() && options.to == KeyStyle::kOpenVla) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor \"", name, "\" has no counterpart in the style openvla"));
    }
    if (result.has_value()) {
      const auto [other, is_new] = taken.emplace(*result, name);
      if (!is_new) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensors \"", other->second, "\" and \"", name,
                         "\" would both be called \"", *result, "\""));
      }
    }
    mapped.push_back(std::move(result));
  }
  return mapped;
}

}  // namespace fullshard
