#include "fullshard/sharding/wrap_policy.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/nn/module.h"

namespace fullshard {
namespace {

using ::testing::HasSubstr;

struct Block : torch::nn::Module {};
struct WideBlock : Block {};
struct Other : torch::nn::Module {};

TEST(WrapPolicyTest, DefaultMatchesNothing) {
  Block block;
  EXPECT_TRUE(WrapPolicy().empty());
  EXPECT_FALSE(WrapPolicy().matches("b", block));
}

TEST(WrapPolicyTest, TypeMatchesItselfAndSubclasses) {
  Block block;
  WideBlock wide;
  Other other;
  EXPECT_TRUE(module_type<Block>().matches("b", block));
  EXPECT_TRUE(module_type<Block>().matches("w", wide));
  EXPECT_FALSE(module_type<Block>().matches("o", other));
  EXPECT_FALSE(module_type<WideBlock>().matches("b", block));
  EXPECT_THAT(module_type<Block>().description(), HasSubstr("Block"));
}

TEST(WrapPolicyTest, PredicateSeesNameAndModule) {
  Block block;
  const WrapPolicy policy =
      module_if([&](const std::string& name, torch::nn::Module& module) {
        return name == "layers.1" && &module == &block;
      });
  Block same_type;
  EXPECT_TRUE(policy.matches("layers.1", block));
  EXPECT_FALSE(policy.matches("layers.2", block));
  EXPECT_FALSE(policy.matches("layers.1", same_type));
}

TEST(WrapPolicyTest, ListMatchesTheseModulesOnly) {
  auto first = std::make_shared<Block>(), second = std::make_shared<Block>();
  const WrapPolicy policy = module_list({first});
  EXPECT_TRUE(policy.matches("a", *first));
  EXPECT_FALSE(policy.matches("b", *second));
}

TEST(WrapPolicyTest, AnyOfMatchesWhatOneOfThemMatches) {
  auto other = std::make_shared<Other>();
  Block block;
  const WrapPolicy policy =
      any_of({module_type<WideBlock>(), module_list({other})});
  WideBlock wide;
  EXPECT_TRUE(policy.matches("w", wide));
  EXPECT_TRUE(policy.matches("o", *other));
  EXPECT_FALSE(policy.matches("b", block));
  EXPECT_THAT(policy.description(), HasSubstr("WideBlock"));
}

}  // namespace
}  // namespace fullshard
