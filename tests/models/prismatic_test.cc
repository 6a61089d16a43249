#include "fullshard/models/prismatic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "ATen/ops/allclose.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/tensor.h"

namespace fullshard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsSupersetOf;

PrismaticOptions tiny_options() {
  PrismaticOptions options;
  options.vision.image_size = 8;
  options.vision.patch_size = 4;
  options.vision.width = 16;
  options.vision.depth = 2;
  options.vision.mlp_width = 32;
  options.decoder.vocab_size = 11;
  options.decoder.width = 16;
  options.decoder.mlp_width = 24;
  return options;
}

std::shared_ptr<Prismatic> tiny_model(uint64_t seed = 7) {
  at::manual_seed(seed);
  return std::make_shared<Prismatic>(tiny_options());
}

at::Tensor longs(std::vector<int64_t> values, int64_t columns) {
  return at::tensor(values, at::kLong).view({-1, columns});
}

// Three rows with images; the texts have 4, 3 and 2 tokens after BOS.
VlmBatch small_batch() {
  at::manual_seed(3);
  VlmBatch batch;
  batch.pixel_values = at::rand({3, 1, 8, 8}) * 2 - 1;
  batch.input_ids = longs({1, 5, 6, 7, 2, 1, 8, 9, 2, 0, 1, 10, 2, 0, 0}, 5);
  batch.labels = longs(
      {-100, 5, 6, 7, 2, -100, 8, 9, 2, -100, -100, 10, 2, -100, -100}, 5);
  batch.attention_mask = batch.input_ids.ne(0);
  batch.multimodal_indices = at::arange(3, at::kLong);
  return batch;
}

VlmBatch rows_of(const VlmBatch& batch, int64_t begin, int64_t count,
                 int64_t tokens) {
  VlmBatch part;
  part.pixel_values = batch.pixel_values.narrow(0, begin, count);
  part.input_ids = batch.input_ids.narrow(0, begin, count).narrow(1, 0, tokens);
  part.labels = batch.labels.narrow(0, begin, count).narrow(1, 0, tokens);
  part.attention_mask =
      batch.attention_mask.narrow(0, begin, count).narrow(1, 0, tokens);
  part.multimodal_indices = at::arange(count, at::kLong);
  return part;
}

double loss_of(Prismatic& model, const VlmBatch& batch) {
  return model.forward(batch).loss_sum.item<double>();
}

std::set<std::string> trainable_names(const Prismatic& model) {
  std::set<std::string> names;
  for (const auto& item : model.named_parameters()) {
    if (item.value().requires_grad()) names.insert(item.key());
  }
  return names;
}

TEST(PrismaticTest, NamesAreThoseOfTimmHuggingFaceAndPrismatic) {
  std::vector<std::string> names;
  for (const auto& item : tiny_model()->named_parameters()) {
    names.push_back(item.key());
  }
  EXPECT_THAT(
      names,
      IsSupersetOf(std::vector<std::string>{
          "vision_backbone.featurizer.pos_embed",
          "vision_backbone.featurizer.patch_embed.proj.weight",
          "vision_backbone.featurizer.blocks.0.norm1.bias",
          "vision_backbone.featurizer.blocks.1.attn.qkv.weight",
          "vision_backbone.featurizer.blocks.1.attn.proj.bias",
          "vision_backbone.featurizer.blocks.1.mlp.fc2.weight",
          "vision_backbone.featurizer.norm.weight",
          "projector.projector.0.weight", "projector.projector.2.bias",
          "llm_backbone.llm.model.embed_tokens.weight",
          "llm_backbone.llm.model.layers.1.self_attn.q_proj.weight",
          "llm_backbone.llm.model.layers.1.mlp.down_proj.weight",
          "llm_backbone.llm.model.layers.1.input_layernorm.weight",
          "llm_backbone.llm.model.layers.1.post_attention_layernorm.weight",
          "llm_backbone.llm.model.norm.weight",
          "llm_backbone.llm.lm_head.weight"}));
  const auto model = tiny_model();
  for (const std::string& name : names) {
    int num_owners = 0;
    for (const std::string& key : model->all_module_keys()) {
      num_owners += name.rfind(key + ".", 0) == 0 ? 1 : 0;
    }
    EXPECT_EQ(num_owners, 1) << name;
  }
}

TEST(PrismaticTest, EqualSeedsGiveEqualModels) {
  const auto one = tiny_model(5)->parameters(),
             two = tiny_model(5)->parameters(),
             other = tiny_model(6)->parameters();
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(one[i].equal(two[i]));
  EXPECT_FALSE(one[0].equal(other[0]));
}

TEST(PrismaticTest, UnitsAreBlocksTowerLayersAndProjector) {
  const auto model = tiny_model();
  std::vector<std::string> names;
  for (const auto& unit : model->unit_modules()) {
    for (const auto& item : model->named_modules()) {
      if (item.value() == unit) names.push_back(item.key());
    }
  }
  EXPECT_THAT(names,
              ElementsAre("vision_backbone.featurizer.blocks.0",
                          "vision_backbone.featurizer.blocks.1",
                          "vision_backbone.featurizer",
                          "llm_backbone.llm.model.layers.0",
                          "llm_backbone.llm.model.layers.1", "projector"));
}

TEST(PrismaticTest, StagesTrainWhatTheirTableSays) {
  struct Case {
    const char* stage;
    std::vector<std::string> keys;
    bool vision_frozen;
    std::set<std::string> prefixes;  // Of exactly the trainable parameters.
  };
  const std::string llm = "llm_backbone.llm.";
  const std::set<std::string> ends = {
      llm + "model.embed_tokens.", llm + "model.layers.1.", llm + "lm_head."};
  std::set<std::string> sandwich = ends;
  sandwich.insert({"vision_backbone.", "projector."});
  const std::vector<std::string> all = {"vision_backbone", "projector",
                                        "llm_backbone"};
  const std::vector<Case> cases = {
      {"align", {"projector"}, true, {"projector."}},
      {"finetune",
       {"projector", "llm_backbone"},
       true,
       {"projector.", "llm_backbone."}},
      {"vla-train",
       {"projector", "llm_backbone"},
       true,
       {"projector.", "llm_backbone."}},
      {"full-finetune", all, false, {""}},
      {"vla-full-train", all, false, {""}},
      {"last-layer-finetune", {"llm_backbone"}, true, ends},
      {"vla-last-layer-train", {"llm_backbone"}, true, ends},
      {"vla-sandwich-train", all, false, sandwich}};
  EXPECT_EQ(cases.size(), Prismatic::stages().size());
  const auto model = tiny_model();
  for (const Case& c : cases) {
    ASSERT_TRUE(model->freeze_backbones(c.stage).ok());
    EXPECT_EQ(model->trainable_module_keys(), c.keys) << c.stage;
    EXPECT_EQ(model->vision_frozen(), c.vision_frozen) << c.stage;
    const std::set<std::string> trainable = trainable_names(*model);
    for (const auto& item : model->named_parameters()) {
      bool expected = false;
      for (const std::string& prefix : c.prefixes) {
        expected = expected || item.key().rfind(prefix, 0) == 0;
      }
      EXPECT_EQ(trainable.count(item.key()) == 1, expected)
          << c.stage << ": " << item.key();
    }
  }
}

TEST(PrismaticTest, AnUnknownStageIsRefusedWithTheList) {
  const absl::Status status = tiny_model()->freeze_backbones("fine-tune");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'fine-tune'"));
  for (const std::string& stage : Prismatic::stages()) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(stage));
  }
}

TEST(PrismaticTest, LossIsSummedOverTargets) {
  const auto model = tiny_model();
  const VlmBatch batch = small_batch();
  const LossTerms terms = model->forward(batch);
  EXPECT_EQ(terms.num_targets, 9);
  EXPECT_EQ(terms.loss_sum.dim(), 0);
  EXPECT_EQ(terms.loss_sum.scalar_type(), at::kFloat);
  // An untrained model knows nothing: about log(vocabulary) each.
  EXPECT_NEAR(terms.loss_sum.item<double>() / 9, std::log(11.0), 0.3);
}

TEST(PrismaticTest, RowsDoNotSeeEachOtherNorThePadding) {
  const auto model = tiny_model();
  const VlmBatch batch = small_batch();
  const double apart = loss_of(*model, rows_of(batch, 0, 1, 5)) +
                       loss_of(*model, rows_of(batch, 1, 1, 4)) +
                       loss_of(*model, rows_of(batch, 2, 1, 3));
  EXPECT_NEAR(loss_of(*model, batch), apart, 1e-4);
}

TEST(PrismaticTest, ATargetIsNotSeenBeforeItIsPredicted) {
  const auto model = tiny_model();
  VlmBatch batch = small_batch();
  const auto first_target_loss = [&] {
    VlmBatch first = batch;
    first.labels = batch.labels.clone();
    first.labels.narrow(1, 2, 3).fill_(kIgnoredLabel);
    return loss_of(*model, first);
  };
  const double before = first_target_loss();
  batch.input_ids = batch.input_ids.clone();
  batch.input_ids.narrow(1, 1, 4).fill_(4);
  EXPECT_NEAR(first_target_loss(), before, 1e-5);
}

TEST(PrismaticTest, RowsWithoutImageAreTextAlone) {
  const auto model = tiny_model();
  const VlmBatch batch = small_batch();
  VlmBatch text = rows_of(batch, 1, 1, 5);
  text.multimodal_indices = at::arange(0, at::kLong);
  VlmBatch mixed = batch;
  mixed.multimodal_indices = at::tensor({0, 2}, at::kLong);
  const double expected = loss_of(*model, rows_of(batch, 0, 1, 5)) +
                          loss_of(*model, text) +
                          loss_of(*model, rows_of(batch, 2, 1, 5));
  EXPECT_NEAR(loss_of(*model, mixed), expected, 1e-4);
  EXPECT_EQ(model->forward(mixed).num_targets, 9);
  // A text's loss does not depend on the pixels in its row.
  text.pixel_values = text.pixel_values + 1;
  VlmBatch original = rows_of(batch, 1, 1, 5);
  original.multimodal_indices = text.multimodal_indices;
  EXPECT_EQ(loss_of(*model, text), loss_of(*model, original));
}

TEST(PrismaticTest, FrozenVisionGetsNoGradient) {
  const auto model = tiny_model();
  ASSERT_TRUE(model->freeze_backbones("align").ok());
  model->forward(small_batch()).loss_sum.backward();
  for (const auto& item : model->named_parameters()) {
    EXPECT_EQ(item.value().grad().defined(),
              item.key().rfind("projector.", 0) == 0)
        << item.key();
  }
}

TEST(PrismaticTest, EveryParameterGetsAGradientInFullFinetune) {
  const auto model = tiny_model();
  ASSERT_TRUE(model->freeze_backbones("full-finetune").ok());
  model->forward(small_batch()).loss_sum.backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_GT(item.value().grad().abs().sum().item<double>(), 0) << item.key();
  }
}

TEST(PrismaticTest, CheckpointedLayersGiveTheSameGradients) {
  const auto plain = tiny_model(), recomputed = tiny_model();
  for (const auto& layer : recomputed->checkpoint_modules()) {
    auto* const checkpointable = dynamic_cast<CheckpointSwitch*>(layer.get());
    ASSERT_NE(checkpointable, nullptr);
    checkpointable->set_activation_checkpointing(true);
  }
  plain->forward(small_batch()).loss_sum.backward();
  recomputed->forward(small_batch()).loss_sum.backward();
  const auto expected = plain->parameters(), got = recomputed->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(got[i].grad().equal(expected[i].grad())) << i;
  }
}

TEST(PrismaticTest, GenerateTakesTheLikeliestTokenUpToEos) {
  const auto model = tiny_model();
  const VlmBatch batch = small_batch();
  constexpr int64_t kNewTokens = 4;
  const auto captions =
      model->generate(batch.pixel_values, kNewTokens, /*bos=*/1, /*eos=*/-1);
  ASSERT_EQ(captions.size(), 3u);
  // Each token costs less than any other one in its place.
  for (int64_t row = 0; row < 3; ++row) {
    const auto& caption = captions[static_cast<size_t>(row)];
    ASSERT_EQ(caption.size(), static_cast<size_t>(kNewTokens));
    std::vector<int64_t> ids = {1};
    for (const int64_t token : caption) {
      std::vector<double> losses;
      for (int64_t candidate = 0; candidate < 11; ++candidate) {
        std::vector<int64_t> with = ids;
        with.push_back(candidate);
        VlmBatch one = rows_of(batch, row, 1, 1);
        one.input_ids = longs(with, static_cast<int64_t>(with.size()));
        one.labels = one.input_ids.clone();
        one.labels.narrow(1, 0, static_cast<int64_t>(ids.size()))
            .fill_(kIgnoredLabel);
        losses.push_back(loss_of(*model, one));
      }
      for (const double loss : losses) {
        EXPECT_LE(losses[static_cast<size_t>(token)], loss + 1e-5);
      }
      ids.push_back(token);
    }
  }
  // What follows the end is not part of a caption.
  const int64_t eos = captions[0][0];
  EXPECT_TRUE(
      model->generate(batch.pixel_values, kNewTokens, 1, eos)[0].empty());
}

TEST(CausalDecoderTest, EqualTokensGiveEqualLogitsAtEveryPosition) {
  at::manual_seed(1);
  CausalDecoderOptions options;
  options.width = 16;
  options.mlp_width = 24;
  CausalDecoderImpl decoder(options);
  at::NoGradGuard no_grad;
  const at::Tensor token = at::rand({1, 1, 16});
  // Equal tokens attend to equal values wherever they are.
  const at::Tensor logits = decoder.forward(token.expand({1, 5, 16}));
  for (int64_t t = 1; t < 5; ++t) {
    EXPECT_TRUE(logits.select(1, t).allclose(logits.select(1, 0), 1e-4, 1e-6));
  }
}

TEST(RmsNormTest, DividesByTheRootMeanSquare) {
  RmsNormImpl norm(4, /*eps=*/0);
  const at::Tensor x = at::tensor({1.f, -1.f, 7.f, 7.f});
  EXPECT_TRUE(norm.forward(x).allclose(x / 5));
}

}  // namespace
}  // namespace fullshard
