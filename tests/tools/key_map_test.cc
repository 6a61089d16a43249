#include "fullshard/tools/key_map.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fullshard {
namespace {

using Names = std::vector<std::string>;

// Maps and unwraps; "-" for what is left out.
Names map(const Names& names, KeyStyle from, KeyStyle to,
          const std::string& fused_tower = "siglip") {
  const auto mapped = map_keys(names, {from, to, fused_tower});
  EXPECT_TRUE(mapped.ok()) << mapped.status();
  Names result;
  if (!mapped.ok()) return result;
  for (const auto& name : *mapped) result.push_back(name.value_or("-"));
  return result;
}

std::string error(const Names& names, KeyStyle from, KeyStyle to) {
  return std::string(map_keys(names, {from, to, "siglip"}).status().message());
}

// As vla-scripts/extern/convert_openvla_weights_to_hf.py of OpenVLA maps them.
const Names& fused_prismatic() {
  static const auto* const names =
      new Names{"projector.projector.0.weight",
                "projector.projector.2.bias",
                "projector.projector.4.weight",
                "llm_backbone.llm.model.layers.3.self_attn.q_proj.weight",
                "llm_backbone.llm.lm_head.weight",
                "vision_backbone.dino_featurizer.blocks.0.ls1.gamma",
                "vision_backbone.dino_featurizer.blocks.0.attn.qkv.weight",
                "vision_backbone.siglip_featurizer.blocks.26.mlp.fc2.bias"};
  return *names;
}
const Names& fused_openvla() {
  static const auto* const names =
      new Names{"projector.fc1.weight",
                "projector.fc2.bias",
                "projector.fc3.weight",
                "language_model.model.layers.3.self_attn.q_proj.weight",
                "language_model.lm_head.weight",
                "vision_backbone.featurizer.blocks.0.ls1.scale_factor",
                "vision_backbone.featurizer.blocks.0.attn.qkv.weight",
                "vision_backbone.fused_featurizer.blocks.26.mlp.fc2.bias"};
  return *names;
}

TEST(KeyMapTest, PrismaticAndOpenVlaWithFusedTowers) {
  EXPECT_EQ(map(fused_prismatic(), KeyStyle::kPrismatic, KeyStyle::kOpenVla),
            fused_openvla());
  EXPECT_EQ(map(fused_openvla(), KeyStyle::kOpenVla, KeyStyle::kPrismatic),
            fused_prismatic());
}

TEST(KeyMapTest, OneTowerKeepsItsName) {
  const Names prismatic = {"vision_backbone.featurizer.blocks.1.ls2.gamma",
                           "vision_backbone.featurizer.norm.weight"};
  const Names openvla = {"vision_backbone.featurizer.blocks.1.ls2.scale_factor",
                         "vision_backbone.featurizer.norm.weight"};
  EXPECT_EQ(map(prismatic, KeyStyle::kPrismatic, KeyStyle::kOpenVla), openvla);
  EXPECT_EQ(map(openvla, KeyStyle::kOpenVla, KeyStyle::kPrismatic), prismatic);
}

TEST(KeyMapTest, ClipAsTheSecondTower) {
  const Names prismatic = {"vision_backbone.dino_featurizer.pos_embed",
                           "vision_backbone.clip_featurizer.pos_embed"};
  const Names openvla = {"vision_backbone.featurizer.pos_embed",
                         "vision_backbone.fused_featurizer.pos_embed"};
  EXPECT_EQ(map(prismatic, KeyStyle::kPrismatic, KeyStyle::kOpenVla), openvla);
  EXPECT_EQ(map(openvla, KeyStyle::kOpenVla, KeyStyle::kPrismatic, "clip"),
            prismatic);
}

TEST(KeyMapTest, LanguageModelAndVisionTowerAlone) {
  const Names prismatic = {"vision_backbone.featurizer.blocks.0.ls1.gamma",
                           "projector.projector.0.weight",
                           "llm_backbone.llm.model.norm.weight"};
  EXPECT_EQ(map(prismatic, KeyStyle::kPrismatic, KeyStyle::kLanguageModel),
            (Names{"-", "-", "model.norm.weight"}));
  EXPECT_EQ(map(prismatic, KeyStyle::kPrismatic, KeyStyle::kVisionTower),
            (Names{"blocks.0.ls1.gamma", "-", "-"}));
  EXPECT_EQ(
      map({"lm_head.weight"}, KeyStyle::kLanguageModel, KeyStyle::kOpenVla),
      Names{"language_model.lm_head.weight"});
  EXPECT_EQ(
      map({"blocks.0.ls1.gamma"}, KeyStyle::kVisionTower, KeyStyle::kOpenVla),
      Names{"vision_backbone.featurizer.blocks.0.ls1.scale_factor"});
}

TEST(KeyMapTest, OnlyLayerScaleIsRenamed) {
  const Names names = {"vision_backbone.featurizer.norm.gamma",
                       "llm_backbone.llm.ls1.weight"};
  EXPECT_EQ(map(names, KeyStyle::kPrismatic, KeyStyle::kOpenVla),
            (Names{"vision_backbone.featurizer.norm.gamma",
                   "language_model.ls1.weight"}));
}

TEST(KeyMapTest, StylesAreRecognised) {
  EXPECT_EQ(recognise_key_style(fused_prismatic()), KeyStyle::kPrismatic);
  EXPECT_EQ(recognise_key_style(fused_openvla()), KeyStyle::kOpenVla);
  EXPECT_EQ(recognise_key_style({"model.layers.0.weight"}), std::nullopt);
  EXPECT_EQ(recognise_key_style({}), std::nullopt);
  EXPECT_EQ(*parse_key_style("llm"), KeyStyle::kLanguageModel);
  EXPECT_FALSE(parse_key_style("hf").ok());
}

TEST(KeyMapTest, WhatDoesNotFitIsNamed) {
  EXPECT_NE(error({"projector.fc1.weight", "optimizer.step"},
                  KeyStyle::kOpenVla, KeyStyle::kPrismatic)
                .find("\"optimizer.step\""),
            std::string::npos);
  EXPECT_NE(error({"projector.projector.1.weight"}, KeyStyle::kPrismatic,
                  KeyStyle::kOpenVla)
                .find("no counterpart"),
            std::string::npos);
  EXPECT_NE(
      error(fused_prismatic(), KeyStyle::kPrismatic, KeyStyle::kVisionTower)
          .find("two fused"),
      std::string::npos);
  EXPECT_NE(error({"vision_backbone.dino_featurizer.a.ls1.gamma",
                   "vision_backbone.dino_featurizer.a.ls1.scale_factor"},
                  KeyStyle::kPrismatic, KeyStyle::kOpenVla)
                .find("would both be called"),
            std::string::npos);
}

}  // namespace
}  // namespace fullshard
