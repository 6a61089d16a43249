#ifndef FULLSHARD_TESTS_TESTING_UNSHARDED_REFERENCE_H_
#define FULLSHARD_TESTS_TESTING_UNSHARDED_REFERENCE_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "torch/nn/module.h"
#include "torch/optim/adamw.h"

namespace fullshard {
namespace testing {

// One process that trains the same model on the batches of all ranks: what
// sharded training must equal. Masters are fp32; with a compute dtype the
// module computes on cast copies, as mixed precision does.
class UnshardedReference {
 public:
  // Adam's epsilon. Large, for a gradient that is zero in exact arithmetic (the
  // bias of attention keys) would else turn its rounding into a full step.
  static constexpr double kEps = 1e-3;

  // `loss(module, rank)` is the mean loss of that rank's batch.
  using Loss = std::function<at::Tensor(torch::nn::Module& module, int rank)>;

  UnshardedReference(std::shared_ptr<torch::nn::Module> module, double lr,
                     double weight_decay,
                     std::optional<at::ScalarType> compute_dtype = {})
      : module_(std::move(module)) {
    std::vector<at::Tensor> decay, no_decay;
    for (auto& item : module_->named_parameters()) {
      at::Tensor& p = item.value();
      if (!p.requires_grad()) continue;
      at::Tensor master = p.detach().clone();
      master.set_requires_grad(true);
      names_.push_back(item.key());
      computed_.push_back(p);
      masters_.push_back(master);
      const bool is_bias =
          item.key().size() > 5 &&
          item.key().compare(item.key().size() - 5, 5, ".bias") == 0;
      (p.dim() > 1 && !is_bias ? decay : no_decay).push_back(master);
    }
    if (compute_dtype.has_value()) module_->to(*compute_dtype);
    using torch::optim::AdamWOptions;
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(
        decay, std::make_unique<AdamWOptions>(
                   AdamWOptions(lr).eps(kEps).weight_decay(weight_decay)));
    groups.emplace_back(no_decay,
                        std::make_unique<AdamWOptions>(
                            AdamWOptions(lr).eps(kEps).weight_decay(0)));
    optimizer_ = std::make_unique<torch::optim::AdamW>(groups);
  }

  // Returns the losses of all ranks; leaves the mean gradients, unclipped.
  std::vector<double> forward_backward(int num_ranks, const Loss& loss) {
    {
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < masters_.size(); ++i) {
        computed_[i].copy_(masters_[i]);
        masters_[i].mutable_grad() = at::zeros_like(masters_[i]);
      }
    }
    std::vector<double> losses;
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (at::Tensor& p : computed_) p.mutable_grad() = at::Tensor();
      at::Tensor value = loss(*module_, rank);
      value.backward();
      losses.push_back(value.item<double>());
      at::NoGradGuard no_grad;
      for (size_t i = 0; i < masters_.size(); ++i) {
        if (!computed_[i].grad().defined()) continue;
        masters_[i].mutable_grad().add_(
            computed_[i].grad().to(masters_[i].scalar_type()), 1.0 / num_ranks);
      }
    }
    return losses;
  }

  double clip(double max_norm) {
    double square = 0;
    for (const at::Tensor& master : masters_) {
      square += master.grad().to(at::kDouble).pow(2).sum().item<double>();
    }
    const double norm = std::sqrt(square);
    const double coefficient = max_norm / (norm + 1e-6);
    if (coefficient < 1) {
      for (const at::Tensor& master : masters_) master.grad().mul_(coefficient);
    }
    return norm;
  }

  void step() { optimizer_->step(); }

  const std::vector<std::string>& names() const { return names_; }
  const std::vector<at::Tensor>& masters() const { return masters_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> computed_;  // The module's own parameters.
  std::vector<at::Tensor> masters_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

}  // namespace testing
}  // namespace fullshard

#endif  // FULLSHARD_TESTS_TESTING_UNSHARDED_REFERENCE_H_
