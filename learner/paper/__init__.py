"""The TraPPM papers: a graph autoencoder, a GNN regressor per metric, uncertainty, fine-tuning.

Karthick Panner Selvam and Mats Brorsson, "TraPPM". Where each part of the papers is:

    encoder       graph autoencoder on graphs without labels: Z = encoder(X, A), A' = sigmoid(Z Z^T)
    regressor     SAGEConv layers + embedding + static features -> one metric; a deep ensemble;
                  fine-tuning: V100 regressors from A100 weights (Table V)
    presets       the papers' sizes and training settings, and those for a laptop core

    learner.acquisition.embedding_space    labels chosen over the embedding space, weighted by the
                                           ensemble's uncertainty: strategies of every campaign

`graphs` and `training` are data loading and the training loop. Campaigns and the bench call
`estimators`. `distinct_nodes` is optional (`distinct=False` in a preset): it computes equal nodes
of a batch once. The campaign preset `paper` runs all parts on two CPU cores.

Departures from the papers and their code:

- The loss is that of the logarithm, since relative errors are reported.
- Training ends when architectures that it does not see no longer improve, instead of after a fixed
  number of epochs; the same architectures pick the checkpoint. The learning rate falls along half a
  cosine.
- Static features are scaled over the data set, not over the six numbers of one sample. Sizes enter
  as logarithms next to the one-hot operator, and parameters, MACs and batch sizes are corrected.
- Each graph has one label of shape (1, 1); no sample is lost at the end of an epoch.
- The frozen encoder runs without gradients, once per graph.
- A negative pair lies in the graph of its edge, and a draw that hits an edge is dropped.
- Equal nodes of a batch are computed once. They share a dropout mask. Without dropout, results are
  equal.
- The regressor's output layer starts at zero, and its sum pooling is divided by the mean number of
  nodes of the training set.
- Uncertainty is the spread of five regressors, each trained without one fold of the architectures.
  The variance over the embedding space is that of a Gaussian process, lowered greedily.
- Fine-tuning first shifts the level by the median log ratio of the new device.
- Intervals are conformal, from the errors on the architectures that each network did not see.
"""
